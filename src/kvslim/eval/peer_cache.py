"""PeerCache: a transformers `Cache` with a peer's layers where `KVCache` would have packed ones."""

from __future__ import annotations

from textwrap import shorten
from typing import Any

import torch
from transformers.cache_utils import Cache

from kvslim.errors import InputError, KVSlimError
from kvslim.eval.peers import Peer
from kvslim.integrations.transformers import compat
from kvslim.integrations.transformers.report import LayerReport, storage_nbytes


class PeerCache(Cache):
    """Quantized layers of another project; what cannot be packed stays with transformers, as in `KVCache`.

    Parameters
    ----------
    model : PreTrainedModel
    peer : Peer

    Raises
    ------
    InputError
        What the peer needs is not installed; later, that it cannot hold this model's keys.
    """

    def __init__(self, model: Any, peer: Peer):
        peer.check()
        self.name = peer.name
        kinds = compat.layer_kinds(compat.text_config(model))
        self.reasons = {index: reason for index, (_, _, reason) in enumerate(kinds) if reason}
        self._widths: dict[int, int] = {}  # values per position, all sequences and heads
        super().__init__(
            layers=[
                compat.framework_layer(kind, arguments) if reason else peer.layer() for kind, arguments, reason in kinds
            ]
        )

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        self._widths[layer_idx] = (key_states.numel() + value_states.numel()) // key_states.shape[-2]
        try:
            return super().update(key_states, value_states, layer_idx, *args, **kwargs)
        except Exception as error:  # whatever a foreign layer raises
            if layer_idx in self.reasons or isinstance(error, KVSlimError):
                raise
            raise InputError(
                f"peer '{self.name}' failed in layer {layer_idx} with {type(error).__name__}: "
                f"{shorten(str(error), 200)}; leave it out of --against"
            ) from error

    def layer_reports(self) -> list[LayerReport]:
        """What each layer holds; a peer's recent tokens at full precision do not count as packed."""
        return [
            LayerReport.of_dense(index, layer, self.reasons[index])
            if index in self.reasons
            else self._of_quantized(index, layer)
            for index, layer in enumerate(self.layers)
        ]

    def _of_quantized(self, index: int, layer: Any) -> LayerReport:
        values = self._widths.get(index, 0) * layer.get_seq_length()
        exact = LayerReport.of_dense(index, layer, "").values
        nbytes = storage_nbytes(layer) - storage_nbytes([layer.keys, layer.values])
        return LayerReport(index, True, type(layer).__name__, values, values - exact, nbytes)
