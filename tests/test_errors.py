"""The tree of mistakes, and the hints in their messages."""

import pytest

from meshwright import errors


def test_every_error_is_one_a_user_can_mend() -> None:
    """The command line and HTTP catch the root alone, so no other exception may stand here."""
    found = [kind for kind in vars(errors).values() if isinstance(kind, type)]
    assert errors.MeshwrightError in found
    assert all(issubclass(kind, errors.MeshwrightError) for kind in found)


def test_the_tree_at_the_top_of_the_module_names_them_all() -> None:
    assert errors.__doc__
    for name, kind in vars(errors).items():
        if isinstance(kind, type):
            assert f" {name} " in errors.__doc__, name


@pytest.mark.parametrize(
    ("name", "known", "hint"),
    [
        ("v5q", ["v5p", "v5e", "h100"], "did you mean v5p or v5e?"),
        ("tensr", ["data", "tensor"], "did you mean tensor?"),
        ("pipe", ["b", "a"], "known: a, b"),
        ("zz", list("fedcba"), "known: a, b, c, d, e, f"),
        ("zz", list("lkjihgfedcba"), "nearest: a, b, c, d, e (12 known)"),
    ],
)
def test_nearest(name: str, known: list[str], hint: str) -> None:
    assert errors.nearest(name, known) == hint


def test_a_request_error_says_what_http_needs() -> None:
    error = errors.RequestError("n = 2 is not supported", param="n", code="unsupported_value")
    assert (str(error), error.status, error.param, error.code) == (
        "n = 2 is not supported",
        400,
        "n",
        "unsupported_value",
    )
