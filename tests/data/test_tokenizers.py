import hypothesis
import hypothesis.strategies as st
import numpy as np
import pytest

from sao_jax.data.tokenizers import (
    CharTokenizer,
    WordTokenizer,
    encode_turns,
    ensure_bos,
    logit_positions,
    supervised_mask,
)

WORDS = WordTokenizer(("ann", "has", "nuts"), "ax012.?=<")


def test_ids_start_after_padding():
    tokenizer = CharTokenizer("ab;")
    assert (tokenizer.vocab_size, tokenizer.pad_id) == (4, 0)
    assert tokenizer.encode("ba;") == [2, 1, 3]
    assert tokenizer.decode([0, 2, 1, 0, 3, 0]) == "ba;"


@hypothesis.given(st.text(alphabet="ab;", max_size=20))
def test_decoding_an_encoding_gives_the_text(text):
    tokenizer = CharTokenizer("ab;")
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_errors_name_the_culprit():
    tokenizer = CharTokenizer("ab;")
    with pytest.raises(ValueError, match="'x' in 'axb'"):
        tokenizer.encode("axb")
    with pytest.raises(ValueError, match="1 to 4 are not within"):
        tokenizer.decode([1, 4])
    with pytest.raises(ValueError, match="twice"):
        CharTokenizer("aba")
    with pytest.raises(ValueError, match="at least one"):
        CharTokenizer("")


def test_words_and_characters_have_an_id_each():
    assert WORDS.encode("ann has 12 nuts.<1=x") == [1, 2, 7, 8, 3, 9, 12, 7, 11, 5]
    assert WORDS.decode([0, 1, 2, 0, 7, 8, 3, 9, 0]) == "ann has 12 nuts."
    assert WORDS.encode("") == []
    assert WORDS.decode([]) == ""
    assert WORDS.vocab_size == 13


@hypothesis.given(st.lists(st.integers(0, WORDS.vocab_size - 1)))
def test_decoding_an_encoding_of_words_gives_the_text(ids):
    text = WORDS.decode(ids)
    # Letters that stand side by side read like a word, which is not in the vocabulary.
    if "a" * 2 not in text and "x" * 2 not in text and "ax" not in text and "xa" not in text:
        assert WORDS.decode(WORDS.encode(text)) == text


def test_errors_of_a_word_tokenizer_name_the_culprit():
    with pytest.raises(ValueError, match="'bob' in 'ann has bob' is not in the vocabulary"):
        WORDS.encode("ann has bob")
    for text in ("ann  has", "ann has12", "1 2", "ann.has", " ann", "ann "):
        with pytest.raises(ValueError, match="is not spaced like"):
            WORDS.encode(text)
    with pytest.raises(ValueError, match="not within"):
        WORDS.decode([13])
    with pytest.raises(ValueError, match="none twice"):
        WordTokenizer(("ann", "ann"), "")
    with pytest.raises(ValueError, match="two letters"):
        WordTokenizer(("a",), "b")


@pytest.mark.parametrize("ids", [[1, 9, 8], [9, 8], [1, 1, 9, 8]])
def test_exactly_one_bos_at_the_start(ids):
    assert ensure_bos(ids, bos_id=1) == [1, 9, 8]


def test_bos_and_eos_further_on_are_left_alone():
    assert ensure_bos([1, 9, 1, 2], bos_id=1) == [1, 9, 1, 2]
    assert ensure_bos([], bos_id=1) == [1]


def test_the_first_answer_token_and_the_eos_are_targets():
    tokens = np.array([11, 12, 13, 21, 22, 2])
    mask = supervised_mask(prompt_len=3, total_len=6)
    assert tokens[mask].tolist() == [21, 22, 2]
    assert logit_positions(mask).tolist() == [2, 3, 4]


def test_a_mask_without_a_prefix_is_refused():
    with pytest.raises(ValueError, match="at least 1"):
        supervised_mask(0, 4)
    with pytest.raises(ValueError, match="prompt of 5 in 4"):
        supervised_mask(5, 4)
    with pytest.raises(ValueError, match="token 0"):
        logit_positions([True, False])


def test_turns_become_tokens_with_the_actions_marked():
    tokens, mask = encode_turns(CharTokenizer("ab;"), [("a", False), ("b;", True), ("a", False), (";", True)])
    assert tokens.tolist() == [1, 2, 3, 1, 3]
    assert mask.tolist() == [False, True, True, False, True]
