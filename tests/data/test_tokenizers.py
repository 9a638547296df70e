import hypothesis
import hypothesis.strategies as st
import numpy as np
import pytest

from sao_jax.data.tokenizers import CharTokenizer, encode_turns, ensure_bos, logit_positions, supervised_mask


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
