"""What the package's metadata takes from the checkout: the repository's address and links that lead there.

The address is MESHWRIGHT_REPOSITORY, else git's origin. Where there is none, the package page has no links.
"""

import sys
from pathlib import Path

from hatchling.metadata.plugin.interface import MetadataHookInterface

ROOT = Path(__file__).parent
sys.path.insert(0, str(ROOT))

from docs.generate.links import absolute, repository  # noqa: E402


class Metadata(MetadataHookInterface):
    """Hatchling's hook of the name `custom`."""

    def update(self, metadata: dict) -> None:
        """Writes `readme` and `urls`."""
        address = repository()
        text = (ROOT / "README.md").read_text(encoding="utf-8")
        metadata["readme"] = {
            "content-type": "text/markdown",
            "text": absolute(text, address) if address else text,
        }
        metadata["urls"] = _urls(address) if address else {}


def _urls(address: str) -> dict[str, str]:
    return {
        "Repository": address,
        "Documentation": f"{address}/blob/main/docs/index.md",
        "Changelog": f"{address}/blob/main/CHANGELOG.md",
        "Issues": f"{address}/issues",
    }
