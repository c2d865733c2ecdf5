import pytest
import torch

import setstream as ss
from setstream.errors import ConfigurationError


@pytest.mark.parametrize(
    ("weigh", "log", "message"),
    [
        (lambda logits: logits, False, "strictly positive"),
        (torch.relu, False, "strictly positive"),
        (lambda logits: logits.log(), True, "finite"),
        (lambda logits: logits.exp() / logits.exp().sum(-1, keepdim=True), False, "mixes the elements"),
        (lambda logits: logits - logits.amax(), True, "mixes the elements"),
        (lambda logits: logits.sum(-1).exp(), False, "keep the shape"),
        (lambda logits: 3.0, False, "keep the shape .* gave float"),
    ],
)
def test_activations_that_break_consistency_are_refused(weigh, log, message):
    with pytest.raises(ConfigurationError, match=message):
        ss.Activation("mine", weigh, log=log)


def test_a_users_exp_is_the_softmax():
    mine = ss.UMBC(8, 4, activation=ss.Activation("exp", torch.exp), bias=False)
    softmax = ss.UMBC(8, 4, activation="softmax", bias=False)
    softmax.load_state_dict(mine.state_dict())
    x = torch.randn(2, 30, 8)
    torch.testing.assert_close(mine(x), softmax(x))
