"""Text that an answer may repeat is offered: from a prediction, from the prompt and from the answer itself."""

import random

import pytest

from tandem.core.span_copy import GRAM, INDEXED_AT_ONCE, DraftSource, SpanCopy


def followed(span: SpanCopy, *tokens: int) -> list[bool | None]:
    return [span.add(token) for token in tokens]


def test_a_prediction_is_offered_from_the_beginning() -> None:
    span = SpanCopy([5, 6, 7, 8])
    assert span.source is DraftSource.PREDICTION
    assert span.offer(2) == (5, 6)
    assert followed(span, 5, 6) == [True, True]
    assert (span.offer(9), span.matched, span.hits) == ((7, 8), 2, 2)
    assert followed(span, 7, 8) == [True, True]
    assert span.source is None, "it is over"
    assert span.offer(4) == ()


def test_a_prediction_goes_on_behind_an_edit() -> None:
    text = list(range(100, 160))
    span = SpanCopy(text)
    followed(span, *text[:20], 7, 8, 9)
    assert span.source is None
    followed(span, *text[23:25])
    assert span.offer(3) == tuple(text[25:28])
    assert span.add(text[25]) is True


def test_a_prediction_goes_on_behind_a_part_that_was_left_out() -> None:
    text = list(range(100, 400))
    span = SpanCopy(text)
    followed(span, *text[:20], *text[200 : 200 + GRAM])
    assert span.offer(2) == tuple(text[200 + GRAM : 202 + GRAM])


def test_the_prompt_is_offered_where_the_answer_repeats_it() -> None:
    span = SpanCopy([], [1, 2, 3, 4, 5, 6, 7])
    assert span.offer(1) == ()
    followed(span, 2, 3, 4)
    assert (span.source, span.offer(2), span.matched) == (DraftSource.CONTEXT, (5, 6), 3)


def test_the_latest_place_is_copied() -> None:
    span = SpanCopy([], [1, 2, 3, 4, 9, 1, 2, 3, 5, 8])
    followed(span, 1, 2, 3)
    assert span.offer(2) == (5, 8)


def test_a_loop_goes_on_as_it_began() -> None:
    span = SpanCopy([], [9])
    followed(span, 1, 2, 3, 1, 2, 3)
    assert span.offer(7) == (1, 2, 3, 1, 2, 3, 1)


def test_nothing_is_offered_of_a_prompt_that_is_not_to_be_copied() -> None:
    span = SpanCopy([50, 51, 52])
    followed(span, 1, 2, 3, 1, 2, 3)
    assert span.source is None


def test_no_offer_has_a_token_that_ends_an_answer() -> None:
    assert SpanCopy([5, 6, 7, 8], ending=[7]).offer(4) == (5, 6)


def test_older_outcomes_count_less() -> None:
    span = SpanCopy(range(100, 140))
    followed(span, *range(100, 120))
    assert span.held == span.tried > 5
    span.add(1)
    assert span.tried - span.held == 1


def test_a_long_prompt_is_indexed_in_parts() -> None:
    prompt = list(range(10 * INDEXED_AT_ONCE))
    span = SpanCopy([], prompt)
    span.add(7)
    followed(span, *prompt[-8:-5])
    assert span.source is None, "it has not come so far"
    followed(span, *range(20_000, 20_010), *prompt[-20:-17])
    assert span.offer(2) == tuple(prompt[-17:-15])


@pytest.mark.parametrize("seed", range(20))
def test_offers_are_what_follows_the_same_tokens(seed: int) -> None:
    """Of a small vocabulary, where much is repeated: `matched` tokens agree with those before the offer."""
    draw = random.Random(seed)
    prediction, prompt = ([draw.randrange(3, 9) for _ in range(draw.randrange(80))] for _ in range(2))
    span = SpanCopy(prediction, prompt, ending=[3])
    context = list(prompt)
    for _ in range(200):
        offered = span.offer(6)
        token = offered[0] if offered and draw.random() < 0.7 else draw.randrange(3, 9)
        if offered:
            assert 3 not in offered
            behind = context[len(context) - span.matched :] if span.matched else []
            text = [*prediction, -1, *context, *offered]
            whole = [*behind, *offered]
            assert any(text[place : place + len(whole)] == whole for place in range(len(text))), "it stands nowhere"
        expected = None if span.source is None else bool(offered) and offered[0] == token
        found = span.add(token)
        assert found is not None or expected is None
        if offered:
            assert found == (offered[0] == token)
        context.append(token)
