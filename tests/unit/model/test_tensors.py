"""Values on their way to a device."""

from array import array

import pytest
import torch

from baton.model.tensors import upload


@pytest.mark.parametrize("code", "Iq")
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("values", [[], [7, 0, 2**31 - 1]], ids=len)
def test_an_array_becomes_the_tensor_that_a_list_does(code: str, dtype: torch.dtype, values: list[int]) -> None:
    given = array(code, values)
    found = upload(given, dtype, torch.device("cpu"))
    assert found.dtype is dtype
    assert found.tolist() == values
    given.extend(values)  # Its memory is not shared: an array with a view can't grow.
    assert found.tolist() == values
