"""mw calibrate: a hardware file of this machine from measurements."""

from pathlib import Path

import typer

from meshwright.cli.command_options import command
from meshwright.cli.console import JSON, LOCAL_HARDWARE, PROCESSES, emit, note, progress, show
from meshwright.cli.hardware import detail, hardware_document
from meshwright.files import check_writable, write_whole
from meshwright.hardware import catalog
from meshwright.hardware.topology import Hardware
from meshwright.nn.start.devices import use_devices_of
from meshwright.options import option

app = typer.Typer(add_completion=False, rich_markup_mode=None)


@command(app)
def calibrate(
    output: Path = option(Path("machine.toml"), flag="-o --output", help="The TOML to write."),
    hardware: str = LOCAL_HARDWARE,
    processes: int = PROCESSES,
    as_json: bool = JSON,
) -> None:
    """Measure this machine and write a hardware file for plans.

    \b
    mw calibrate -o machine.toml
    mw calibrate --hardware cpu:4 --processes 4 -o processes.toml
    mw plan train --model demo --hardware machine.toml --batch-tokens 8Ki --seq-len 256
    """
    check_writable(output)
    measured = _measured(hardware, processes)
    write_whole(output, catalog.dump_toml(measured))
    if as_json:
        emit(hardware_document(measured))
    else:
        show(*detail(measured))
    note(f"wrote {output}")


def _measured(hardware: str, processes: int) -> Hardware:
    """The measurement, in this process or in several that communicate through gloo."""
    with progress() as report:
        if processes > 1:
            from meshwright.bench.local_processes import calibrate_in_processes

            report(f"measuring over {processes} processes", None)
            return calibrate_in_processes(hardware, processes)
        use_devices_of(catalog.load(hardware))
        from meshwright.bench import calibration as bench
        from meshwright.nn.start.compiled_cache import keep_compiled

        keep_compiled()  # compiling the steps of a server takes most of the time
        return bench.calibrate(hardware, progress=lambda what: report(what, None))
