"""Options of drafts, for the commands that generate."""

import typer

from meshwright.serve.model_folder import check_model_folder
from meshwright.serve.settings import EngineSettings


def check_drafts(engine: EngineSettings) -> None:
    """Raise an error for options of drafts that contradict each other."""
    if engine.ratio_test and engine.draft_checkpoint is None and not engine.draft_head:
        raise typer.BadParameter(
            "--ratio-test accepts drafts of a model or head; give --draft-checkpoint DIR or --draft-head"
        )
    if engine.draft_head:
        if engine.draft_checkpoint is not None:
            raise typer.BadParameter(
                "--draft-head and --draft-checkpoint both make the drafts; leave one out"
            )
        if not engine.num_drafts:
            raise typer.BadParameter("--draft-head guesses nothing with --drafts 0; give 1 to 15")
    if engine.draft_checkpoint is not None:
        check_model_folder(engine.draft_checkpoint)
        if not engine.num_drafts:
            raise typer.BadParameter("--draft-checkpoint guesses nothing with --drafts 0; give 1 to 15")
