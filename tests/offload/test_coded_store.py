"""A coded store returns decoded rows, and reads no others."""

import pytest
import torch

from offload.codecs.codec import KvCodec
from offload.codecs.formats import KvFormat
from offload.coded_store import CodedStore, coded_bytes
from offload.errors import CodecError
from offload.host_store import HostStore


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("text", ["q8_0", "k=q8_0,v=q4_0", "fp8", "float16"])
def test_a_coded_store_returns_decoded_rows(text: str, dtype: torch.dtype) -> None:
    kv, form = torch.randn(3, 2, 5000, 2, 32).to(dtype), KvFormat.parse(text)
    store, codec = CodedStore(list(kv), form), KvCodec(form, 32)
    want = torch.from_numpy(codec.decode(codec.encode(kv.float().numpy())))
    indices = torch.randint(-1, 5000, (3, 4, 7))
    assert torch.equal(store.gather(1, indices), HostStore(list(want)).gather(1, indices))
    assert torch.equal(store.rows(2, slice(4000, None)), want[2][:, 4000:])
    assert store.rows(0, slice(9, 9)).shape == (2, 0, 2, 32)
    assert torch.equal(torch.cat(list(store.stream(1, slice(3, 4999))), dim=1), want[1][:, 3:4999])
    assert store.num_bytes == 3 * 2 * 5000 * form.row_bytes(32) == coded_bytes(list(want), form)


def test_gather_reads_only_chosen_rows() -> None:
    """A row of 0xFF decodes to NaN, which would spread to any result that reads it."""
    store = CodedStore([torch.randn(2, 100, 2, 32)], KvFormat.parse("k=fp8,v=q8_0"))
    indices = torch.randint(0, 100, (2, 20))
    want = store.gather(0, indices)
    unread = torch.ones(2, 100, dtype=torch.bool).scatter(1, indices, False)
    store.layers[0][unread] = 0xFF
    assert torch.equal(store.gather(0, indices), want)
    assert store.rows(0, slice(0, 100))[unread].isnan().all()


def test_kv_that_cannot_be_coded_is_refused() -> None:
    kv = torch.zeros(1, 9000, 2, 32)
    kv[0, 8999, 1, 31] = torch.nan
    with pytest.raises(CodecError, match="NaN or infinite"):
        CodedStore([kv], KvFormat.parse("q8_0"))
    with pytest.raises(CodecError, match="head_dim is 80"):
        CodedStore([torch.zeros(1, 5, 2, 80)], KvFormat.parse("k=fp8,v=q4_0"))
