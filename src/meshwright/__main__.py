"""`python -m meshwright` is `mw`."""

from meshwright.cli.main import run

if __name__ == "__main__":
    run()
