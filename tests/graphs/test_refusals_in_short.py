"""How cuDNN's answer of many lines to a graph without a plan is shortened for the message."""

from handlepool.graphs.compile import MOST_REASONS, shorten

CAUSE = "[cudnn_frontend] ERROR: Reason: {}"


def test_each_reason_stands_once_with_the_engines_and_plans_that_gave_it():
    answer = "\n".join(
        [
            "No valid engine configs: _",
            "",
            "before any engine",
            '{"engineId":3,"knobs":[]}',
            "where it came from",
            CAUSE.format("no such layout"),
            CAUSE.format("passed on"),
            '{"engineId":5,"knobs":[]}',
            CAUSE.format("no such layout"),
            "[0] plan_a: out of memory",
            "[1] plan_b: out of memory",
        ]
    )
    assert shorten(answer) == (
        "No valid engine configs; before any engine; engine 3, engine 5: no such layout; plan_a, plan_b: out of memory"
    )


def test_as_many_reasons_as_are_shown_are_not_counted_and_more_are():
    reasons = [f"[{number}] plan_{number}: reason {number}" for number in range(MOST_REASONS + 2)]
    shown = [f"plan_{number}: reason {number}" for number in range(MOST_REASONS)]
    assert shorten("\n".join(["none", *reasons[:MOST_REASONS]])) == "; ".join(["none", *shown])
    assert shorten("\n".join(["none", *reasons])) == "; ".join(["none", *shown, "and 2 other reasons"])


def test_an_answer_without_words_is_none():
    assert shorten("") == shorten("\n \n") == ""
