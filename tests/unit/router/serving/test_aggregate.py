"""Choices put together from their updates, and the best of them."""

from tandem.core.handoff import TokenLogprob
from tandem.core.state_enums import FinishReason
from tandem.router.serving.choices import ChoiceUpdate, WholeChoices


def update(index: int, text: str, *logprobs: float, finish: FinishReason | None = None) -> ChoiceUpdate:
    each = [TokenLogprob(token=5, logprob=value) for value in logprobs]
    return ChoiceUpdate(index, text, tokens=[5] * len(each), text_tokens=len(each), logprobs=each, finish=finish)


def test_updates_add_up() -> None:
    whole = WholeChoices(2)
    whole.add([update(0, "one", -1.0), update(1, "a", -2.0)])
    whole.add([update(0, " two", -3.0, -4.0, finish=FinishReason.STOP)])
    first, second = whole.choices(1)
    assert (first.text, first.tokens, first.finish) == ("one two", [5, 5, 5], FinishReason.STOP)
    assert [each.logprob for each in first.logprobs] == [-1.0, -3.0, -4.0]
    assert (second.text, second.finish) == ("a", None)


def test_the_best_have_the_highest_mean() -> None:
    whole = WholeChoices(8)
    means = [(-1.0,), (-0.5, -1.0), (-0.1, -9.0), (-0.75,), (-3.0,), (-2.0,), (-2.0,), ()]
    whole.add([update(index, str(index), *values) for index, values in enumerate(means)])
    best = whole.choices(2, 2)
    assert [choice.text for choice in best] == ["1", "3", "7", "5"], "of equal ones the first"
    assert [choice.index for choice in best] == [0, 1, 2, 3]
    assert [choice.text for choice in WholeChoices(2).choices(1, 2)] == ["", ""]
