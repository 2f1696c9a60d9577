"""The phases of a step of post-training, each a bar in its pool's row."""

from meshwright.report.pictures.phases import phases_figure


def test_a_phase_without_a_colour_of_its_own_is_drawn() -> None:
    phases = [
        {"pool": "roll out", "what": "roll out", "start_seconds": 0.0, "seconds": 2.0},
        {"pool": "train", "what": "distil", "start_seconds": 2.0, "seconds": 1.0},
        {"pool": "both", "what": "move weights", "start_seconds": 3.0, "seconds": 0.5},
    ]
    drawn = phases_figure({"form": "two pools", "step_seconds": 3.5, "phases": phases}).standalone()
    for title in ("roll out: 2 s", "distil: 1 s", "move weights: 500 ms"):
        assert title in drawn
