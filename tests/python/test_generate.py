"""Generation and beam search against a full forward a step; C++: test_models_parity.py."""

import itertools

import cosformer
import pytest
import torch
from cosformer.models import AttentionConfig, Transformer
from cosformer.models._sampling import philox, sample, uniform
from cosformer.models.beams import _Search
from model_helpers import CAUSAL, small_config


def model_of(config):
    return Transformer(config).double().eval()


def greedy_by_forward(model, prompt, count):
    """The likeliest token of a full forward, each step anew."""
    text = list(prompt)
    with torch.no_grad():
        for _ in range(count):
            text.append(int(model(torch.tensor([text]))[0, -1].argmax()))
    return text[len(prompt) :]


@pytest.mark.parametrize("name", CAUSAL)
def test_greedy_equals_a_full_forward_each_step(name):
    model = model_of(CAUSAL[name])
    prompts = [[1, 2, 3, 4, 5, 6, 7], [8], [3, 3, 9, 10]]
    found = cosformer.generate(model, prompts, max_new_tokens=12, temperature=0.0)
    assert found.dtype == torch.int64 and found.shape == (3, 12)
    for row, prompt in enumerate(prompts):
        assert found[row].tolist() == greedy_by_forward(model, prompt, 12)


def test_prompts_in_every_form():
    model = model_of(small_config())
    one = cosformer.generate(model, [1, 2, 3], max_new_tokens=4)
    assert torch.equal(one, cosformer.generate(model, torch.tensor([1, 2, 3]), max_new_tokens=4))
    assert torch.equal(one, cosformer.generate(model, [[1, 2, 3]], max_new_tokens=4))
    lists = [[1, 2, 3], [4, 5]]
    padded = torch.tensor([[1, 2, 3, 0], [4, 5, 9, 9]])
    expected = cosformer.generate(model, lists, max_new_tokens=4)
    for lengths in ([3, 2], torch.tensor([3, 2])):
        found = cosformer.generate(model, padded, lengths=lengths, max_new_tokens=4)
        assert torch.equal(found, expected)
    tensors = [torch.tensor(row) for row in lists]
    assert torch.equal(cosformer.generate(model, tensors, max_new_tokens=4), expected)
    assert cosformer.generate(model, lists, max_new_tokens=0).shape == (2, 0)


def test_a_row_writes_what_it_would_alone():
    model = model_of(small_config(["softmax", "cosformer"]))
    prompts, seeds = [[1, 2, 3], [4], [5, 6]], [7, 8, 1]
    together = cosformer.generate(model, prompts, seed=seeds, max_new_tokens=10)
    for row, prompt in enumerate(prompts):
        alone = cosformer.generate(model, prompt, seed=seeds[row], max_new_tokens=10)
        assert torch.equal(together[row], alone[0])
    # One seed: rows draw differently, and the same each time.
    same = [[1, 2]] * 3
    once = cosformer.generate(model, same, seed=5, max_new_tokens=10)
    assert torch.equal(once, cosformer.generate(model, same, seed=5, max_new_tokens=10))
    assert len({tuple(row) for row in once.tolist()}) == 3


def test_eos_ends_a_row_and_changes_no_other():
    model = model_of(small_config("softmax"))
    prompts = [[1, 2, 3], [4], [5, 6]]
    free = cosformer.generate(model, prompts, temperature=0.0, max_new_tokens=12)
    eos = int(free[0, 3])
    ended = cosformer.generate(model, prompts, temperature=0.0, max_new_tokens=12, eos_id=eos)
    for row in range(3):
        text = free[row].tolist()
        count = text.index(eos) + 1 if eos in text else 12
        width = ended.shape[1]
        expected = (text[:count] + [eos] * 12)[:width]
        assert ended[row].tolist() == expected
    # All rows done: nothing more is written.
    alone = cosformer.generate(model, prompts[0], temperature=0.0, max_new_tokens=12, eos_id=eos)
    assert alone.shape[1] == free[0].tolist().index(eos) + 1


def test_streams_token_by_token():
    config = small_config("linear", position="none")
    model = Transformer(config).train()
    model.layers[1].eval()
    modes = [module.training for module in model.modules()]
    stream = cosformer.generate_stream(model, [[1], [2, 3]], max_new_tokens=1000)
    first = next(stream)
    assert first.shape == (2,)
    # The caller's own between the tokens.
    assert modes == [module.training for module in model.modules()] and torch.is_grad_enabled()
    rest = list(itertools.islice(stream, 3))
    expected = cosformer.generate(model, [[1], [2, 3]], max_new_tokens=4)
    assert torch.equal(torch.stack([first, *rest], 1), expected)


def test_a_prompt_is_read_in_one_call():
    model = model_of(small_config("linear"))
    lengths = []
    model.layers[0].attention.q_proj.register_forward_hook(
        lambda _, inputs, __: lengths.append(inputs[0].shape[1])
    )
    cosformer.generate(model, [[1] * 9, [2] * 4], max_new_tokens=5)
    assert lengths == [9, 1, 1, 1, 1]


def test_past_the_positions_that_the_model_knows():
    model = model_of(small_config("linear"))  # 32 positions
    stream = cosformer.generate_stream(model, [[1] * 30, [2]], max_new_tokens=9)
    written = []
    with pytest.raises(ValueError, match="stopped after 3 of 9 tokens: the model knows 32"):
        for tokens in stream:
            written.append(tokens)
    assert len(written) == 3
    with pytest.raises(ValueError, match="the prompt has 33 tokens, the model knows 32"):
        cosformer.generate_stream(model, [1] * 33)
    # Rolling: each row goes on from its latter half, when its own turn comes.
    prompts = [[5] * 30, [2, 7]]
    found = cosformer.generate(model, prompts, max_new_tokens=40, rolling=True, temperature=0.0)
    for row, prompt in enumerate(prompts):
        text, expected = list(prompt), []
        for _ in range(40):
            if len(text) > 32:
                text = text[-16:]
            expected.append(int(model(torch.tensor([text]))[0, -1].argmax()))
            text.append(expected[-1])
        assert found[row].tolist() == expected
        alone = cosformer.generate(model, prompt, max_new_tokens=40, rolling=True, temperature=0.0)
        assert torch.equal(alone[0], found[row])


def test_a_window_goes_on_far_past_itself():
    entry = AttentionConfig(kind="softmax", window=4)
    model = model_of(small_config(entry, position="rope"))
    found = cosformer.generate(model, [1, 2, 3], max_new_tokens=60, temperature=0.0)
    assert found[0].tolist() == greedy_by_forward(model, [1, 2, 3], 60)


@pytest.mark.parametrize(
    "ids, options, message",
    [
        ([], {}, "prompt is empty"),
        ([[1], []], {}, "prompt is empty"),
        ([1, 11], {}, "the prompt holds id 11, expected 0 to 10"),
        ([1, -1], {}, "the prompt holds id -1"),
        ([1.5], {}, "a prompt is 1.5, expected ints"),
        ([[1.5]], {}, "the prompt holds id 1.5"),
        (["text"], {}, "a prompt is 'text', expected ints"),
        (torch.ones(2, 2), {}, "ids are torch.float32"),
        (torch.ones(2, 2, dtype=torch.int64), {"lengths": [1]}, "lengths has 1 entries, ids 2"),
        (torch.ones(1, 2, dtype=torch.int64), {"lengths": [3]}, "a length is 3, expected 0 to 2"),
        ([1], {"temperature": -1.0}, "temperature is -1.0"),
        ([1], {"temperature": float("nan")}, "temperature is nan"),
        ([1], {"top_k": -1}, "top_k is -1"),
        ([1], {"top_p": 0.0}, "top_p is 0.0"),
        ([1], {"top_p": 1.5}, "top_p is 1.5"),
        ([1], {"max_new_tokens": -1}, "max_new_tokens is -1"),
        ([1], {"seed": -1}, "seed is -1"),
        ([1], {"seed": [1, 2]}, "seed has 2 entries, ids 1 rows"),
    ],
)
def test_wrong_arguments(ids, options, message):
    model = model_of(small_config())
    with pytest.raises(ValueError, match=message):  # at once, not at the first token
        cosformer.generate_stream(model, ids, **options)


def test_an_encoder_cannot_write():
    with pytest.raises(ValueError, match="not causal"):
        cosformer.generate(model_of(small_config(is_causal=False)), [1])


class TestSampling:
    def test_philox(self):
        """Known answers of Salmon et al. 2011."""
        assert philox(0, 0, 0) == (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)
        ones = (1 << 64) - 1
        assert philox(ones, ones, ones) == (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)

    def test_frequencies_are_the_probabilities(self):
        logits = torch.tensor([0.0, 1.0, -1.0, 2.0, float("-inf")])
        for temperature in (1.0, 0.5):
            draws = [uniform(3, 0, step) for step in range(4000)]
            tokens = sample(
                logits.expand(4000, 5), draws, temperature=temperature, top_k=0, top_p=1.0
            )
            found = tokens.bincount(minlength=5) / 4000
            expected = (logits / temperature).softmax(-1)
            assert (found - expected).abs().max() < 0.03
            assert found[4] == 0

    def test_top_k_and_top_p(self):
        logits = torch.tensor([[1.0, 3.0, 2.0, 3.0, 0.0]])
        draws = [[i / 64] for i in range(64)]

        def reached(**options):
            options = {"top_k": 0, "top_p": 1.0, **options}
            return {int(sample(logits, u, temperature=1.0, **options)) for u in draws}

        assert reached() == {0, 1, 2, 3, 4}
        assert reached(top_k=1) == {1}  # ties go to the lower id
        assert reached(top_k=2) == {1, 3}
        assert reached(top_k=3) == {1, 2, 3}
        assert reached(top_k=9) == {0, 1, 2, 3, 4}
        p = logits.double().softmax(-1)[0]
        assert reached(top_p=float(p[1]) * 0.9) == {1}
        assert reached(top_p=float(p[1]) * 1.1) == {1, 3}
        assert reached(top_p=float(p[1] * 2 + p[2]) - 1e-9) == {1, 2, 3}
        assert reached(top_k=2, top_p=0.4) == {1}  # of what top_k left

    def test_what_is_no_number_is_never_chosen(self):
        nan, inf = float("nan"), float("inf")
        rows = torch.tensor([[nan, 1.0, nan], [nan] * 3, [inf, inf, 0.0], [-inf, -inf, nan]])
        greedy = sample(rows, [], temperature=0.0, top_k=0, top_p=1.0)
        assert greedy.tolist() == [1, 0, 0, 0]
        for options in ({"top_k": 0, "top_p": 1.0}, {"top_k": 2, "top_p": 0.9}):
            drawn = sample(rows, [0.99] * 4, temperature=1.0, **options)
            assert drawn.tolist() == [1, 0, 1, 1]


def log_prob(model, prompt, tokens):
    logits = model(torch.tensor([[*prompt, *tokens]]))[0]
    log_probs = logits.double().log_softmax(-1)
    return sum(log_probs[len(prompt) - 1 + i, token].item() for i, token in enumerate(tokens))


class TestBeamSearch:
    def small(self, kind="cosformer"):
        return model_of(small_config([kind, "softmax"], vocab_size=4))

    def test_one_beam_is_greedy(self):
        model = model_of(small_config(["linear", "softmax"]))
        prompts = [[1, 2, 3], [4]]
        for prompt, [best] in zip(
            prompts,
            cosformer.beam_search(model, prompts, num_beams=1, max_new_tokens=8),
            strict=True,
        ):
            assert best.tokens == greedy_by_forward(model, prompt, 8)
            assert best.log_prob == pytest.approx(log_prob(model, prompt, best.tokens), abs=1e-9)

    def test_enough_beams_find_the_best_of_all(self):
        model = self.small()
        prompts = [[1, 2, 3], [2]]
        found = cosformer.beam_search(model, prompts, num_beams=64, max_new_tokens=3)
        for prompt, hypotheses in zip(prompts, found, strict=True):
            every = [
                (log_prob(model, prompt, tokens), list(tokens))
                for tokens in itertools.product(range(4), repeat=3)
            ]
            every.sort(reverse=True)
            assert [h.tokens for h in hypotheses] == [tokens for _, tokens in every]
            for hypothesis, (expected, _) in zip(hypotheses, every, strict=True):
                assert hypothesis.log_prob == pytest.approx(expected, abs=1e-9)
                assert hypothesis.score == pytest.approx(expected / 3, abs=1e-9)

    @pytest.mark.parametrize("length_penalty", [0.0, 1.0, 2.0, -1.0])
    def test_hypotheses_that_end(self, length_penalty):
        """All sequences of up to 3 tokens that end in eos, or have 3."""
        model = self.small("linear")
        eos, prompt = 2, [1, 3]
        every = []
        for count in (1, 2, 3):
            for tokens in itertools.product(range(4), repeat=count):
                if eos in tokens[:-1] or (tokens[-1] != eos and count < 3):
                    continue
                score = log_prob(model, prompt, tokens) / count**length_penalty
                every.append((score, list(tokens)))
        every.sort(reverse=True)
        [found] = cosformer.beam_search(
            model,
            prompt,
            num_beams=64,
            max_new_tokens=3,
            eos_id=eos,
            length_penalty=length_penalty,
        )
        assert [h.tokens for h in found] == [tokens for _, tokens in every]
        [first, *_] = cosformer.beam_search(
            model, prompt, num_beams=1, max_new_tokens=3, eos_id=eos
        )[0]
        assert first.tokens[-1] == eos or len(first.tokens) == 3

    def test_more_beams_are_no_worse_than_greedy_and_prompts_do_not_mix(self):
        model = model_of(small_config(["cosformer", "softmax"]))
        prompts = [[1, 2, 3], [4], [9, 8, 7, 6]]
        options = {"num_beams": 4, "max_new_tokens": 10, "eos_id": 5}
        together = cosformer.beam_search(model, prompts, **options)
        for prompt, hypotheses in zip(prompts, together, strict=True):
            [alone] = cosformer.beam_search(model, prompt, **options)
            assert [h.tokens for h in alone] == [h.tokens for h in hypotheses]
            assert len(hypotheses) == 4
            scores = [h.score for h in hypotheses]
            assert scores == sorted(scores, reverse=True)
            for each in hypotheses:
                expected = log_prob(model, prompt, each.tokens)
                assert each.log_prob == pytest.approx(expected, abs=1e-9)
        [best, *_] = cosformer.beam_search(model, [1], num_beams=6, max_new_tokens=10)[0]
        [greedy] = cosformer.beam_search(model, [1], num_beams=1, max_new_tokens=10)[0]

    @pytest.mark.parametrize("length_penalty", [0.0, 1.0, -1.0])
    def test_stopping_early_changes_no_result(self, monkeypatch, length_penalty):
        options = {"num_beams": 2, "max_new_tokens": 12, "length_penalty": length_penalty}
        steps = []
        settled = _Search._is_settled

        def search(seed, stops):
            torch.manual_seed(seed)
            model = self.small()

            def counted(self, count):
                steps.append(stops)
                return stops and settled(self, count)

            monkeypatch.setattr(_Search, "_is_settled", counted)
            found = cosformer.beam_search(model, [[1, 2], [3]], eos_id=seed % 4, **options)
            return [[hypothesis.tokens for hypothesis in each] for each in found]

        for seed in range(12):
            assert search(seed, True) == search(seed, False)
        assert steps.count(True) < steps.count(False)  # it does stop early

    def test_errors(self):
        model = self.small()
        with pytest.raises(ValueError, match="num_beams is 0"):
            cosformer.beam_search(model, [1], num_beams=0)
        with pytest.raises(ValueError, match="max_new_tokens is 0"):
            cosformer.beam_search(model, [1], max_new_tokens=0)
        with pytest.raises(ValueError, match="30 tokens and 4 new ones, the model knows 32"):
            cosformer.beam_search(model, [1] * 30, max_new_tokens=4)
        assert len(cosformer.beam_search(model, [1] * 30, max_new_tokens=3)) == 1
        with pytest.raises(ValueError, match="beam_search: the prompt is empty"):
            cosformer.beam_search(model, [])
