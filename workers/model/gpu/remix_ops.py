"""Launches of the kernels that mix several residual streams (hyper-connections)."""

import triton
from torch import Tensor

from csattn.models.spec import StreamsSpec
from csattn.models.weights import StreamWeights
from workers.model.gpu.remix_kernels import add_to_streams_kernel, read_streams_kernel
from workers.model.gpu.stream_ops import Launches, row_constants, stream_arguments
from workers.model.ops import Readers, Stream, StreamsBuffers

_MAX_COLUMNS = 64  # of a program
_WEIGHTS = 8192  # elements of the matrix that fit the registers of a program
_ROWS = 4  # that a program processes one after another


class TritonRemixOps(Launches):
    """The part of `TritonOps` for several streams."""

    _partials: Tensor  # scratch memory, which `TritonOps` allocates

    def remix(
        self,
        weights: StreamWeights,
        spec: StreamsSpec,
        is_first: bool,
        buffers: StreamsBuffers,
        stream: Stream,
        readers: Readers,
    ) -> None:
        assert not stream.centred and readers.ahead is None, "several streams are not centred, nor read ahead"
        batch_size, num, hidden_size = buffers.streams.shape
        num_out = len(weights.bias)
        block_num, block_out = triton.next_power_of_2(num), triton.next_power_of_2(num_out)
        columns = max(1, min(_MAX_COLUMNS, _WEIGHTS // (block_num * block_out)))
        num_parts = triton.cdiv(hidden_size, columns)
        products = self._partials[: batch_size * num_parts * num_out]
        sums = self._partials[len(products) : len(products) + batch_size * num_parts]
        assert len(sums) == batch_size * num_parts, "they fit the room of split sums"
        add_to_streams_kernel[(num_parts, triton.cdiv(batch_size, _ROWS))](
            *(stream.hidden, buffers.post, buffers.comb, weights.matrix, buffers.streams, products, sums),
            *(batch_size, num_out, hidden_size),
            FIRST=is_first,
            NUM=num,
            BLOCK_NUM=block_num,
            BLOCK_OUT=block_out,
            BLOCK=columns,
            ROWS=_ROWS,
            num_warps=4,
            **self._launch(),
        )
        hidden, *prepared = stream_arguments(stream, readers)
        read_streams_kernel[(batch_size,)](
            *(
                buffers.streams,
                products,
                sums,
                weights.bias,
                weights.scales,
                buffers.post,
                buffers.comb,
                hidden,
                *prepared,
            ),
            *(len(stream.squares), num_parts, num_out, hidden_size, self._eps, spec.eps, spec.iterations),
            JOINS=weights.joins,
            NUM=num,
            BLOCK_NUM=block_num,
            BLOCK_PARTS=triton.next_power_of_2(num_parts),
            **row_constants(stream, readers),
            **self._launch(),
        )
