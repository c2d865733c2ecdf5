import pytest
import torch

import setstream as ss
from setstream.states.accumulators import Sums


def test_methods_by_their_old_names_still_work():
    """A pool written for 0.1: a DeprecationWarning where the class is made, and then as ever."""
    with pytest.warns(DeprecationWarning, match=r"Old\.(absorb|empty)_parts is now") as caught:

        class Old(ss.Pool):
            def empty_parts(self, batch, device, width=None):
                return {"pooled": Sums(total=torch.zeros(batch, width or 1, device=device))}

            def absorb_parts(self, context, features, mask):
                return {"pooled": Sums(total=features.sum(1))}

            def finalize(self, state):
                return state.accumulators["pooled"]["total"]

    assert len(caught) == 2
    encoder = ss.SetEncoder(torch.nn.Identity(), Old())
    x = torch.randn(2, 9, 3)
    torch.testing.assert_close(encoder.finalize(sum(encoder.update(None, chunk) for chunk in x.split(4, dim=1))), x.sum(1))
