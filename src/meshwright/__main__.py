"""`python -m meshwright` is `mw`."""

import signal


def run() -> None:
    """The entry point of `mw` and `meshwright`; Ctrl-C ends it without a traceback, during imports too."""
    is_default = signal.getsignal(signal.SIGINT) is signal.default_int_handler
    if is_default:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    from meshwright.cli.main import run

    if is_default:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    run()


if __name__ == "__main__":
    run()
