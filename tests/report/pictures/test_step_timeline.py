"""One step along time, drawn."""

from xml.etree import ElementTree

import meshwright as mw
from meshwright.report.pictures.step_timeline import timeline_figure


def test_the_figure_is_a_drawing_with_words():
    layout = "fsdp=16,tensor=4,sequence_parallel=true,remat=full"
    candidate = mw.price("llama-3-8b", "v5e:8x8", mw.Train("1Mi", "4k"), layout).candidate
    text = timeline_figure(candidate).standalone()
    assert ElementTree.fromstring(text).tag.endswith("svg")
    assert "chip" in text and "compute, forward" in text and "One step along time" in text
