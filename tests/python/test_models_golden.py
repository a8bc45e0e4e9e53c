"""The generic Transformer against what transformers computes (float64) on tiny checkpoints."""

import pytest
from golden_models import MAPPINGS, golden_model, golden_values
from helpers import relative


@pytest.mark.parametrize("name", MAPPINGS)
def test_logits_of_public_checkpoints(name):
    golden = golden_values(name)
    found = golden_model(name).double()(golden["input_ids"])
    assert relative(found, golden["logits"]) < 3e-7  # float32 on disk
