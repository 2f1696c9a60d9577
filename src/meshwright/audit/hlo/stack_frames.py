"""Source lines of HLO instructions: the tables that XLA prints ahead of the computations."""

import re
from collections.abc import Mapping


class StackFrames:
    """The tables FileNames, FileLocations and StackFrames ahead of the computations.

    XLA before 2025 wrote source_file and source_line into each line; now a line names a stack frame.
    """

    def __init__(self, text: str) -> None:
        head = text[: text.find("\n%")]
        self.files = {
            int(n): name for n, name in re.findall(r'^(\d+) "(.*)"$', _section(head, "FileNames"), re.M)
        }
        location = re.compile(r"^(\d+) \{file_name_id=(\d+).*?\bline=(\d+)", re.M)
        found = location.findall(_section(head, "FileLocations"))
        self.locations = {int(n): (int(file), int(line)) for n, file, line in found}
        frame = re.compile(r"^(\d+) \{file_location_id=(\d+)", re.M)
        self.frames = {int(n): int(place) for n, place in frame.findall(_section(head, "StackFrames"))}

    def source(self, metadata: Mapping[str, str]) -> tuple[str, int | None]:
        """(file, line) of an instruction's metadata; ("", None) where it has none."""
        if "source_line" in metadata:
            return metadata.get("source_file", ""), int(metadata["source_line"])
        place = self.frames.get(int(metadata.get("stack_frame_id", -1)), -1)
        file, line = self.locations.get(place, (-1, None))
        return self.files.get(file, ""), line


def _section(head: str, title: str) -> str:
    """The lines of one table, up to the next blank line."""
    found = re.search(rf"^{title}\n(.*?)(?:\n\n|\Z)", head, re.M | re.S)
    return found[1] if found else ""
