"""What the loss adds to the gradient of a layer's weights past the layer's output."""

from __future__ import annotations

from ddpnopt.ddp.penalty import Penalties, is_penalty
from ddpnopt.linear.given import Given
from ddpnopt.trace.hooks import Capture
from ddpnopt.trace.recording import LayerRecord
from ddpnopt.trace.rescaling import share_among_samples


def penalties_of(layers: list[LayerRecord], capture: Capture) -> Penalties:
    """The penalties on the weights; where a gradient is not that of one, the model may read the weights itself."""
    share_among_samples(layers, is_penalty)
    with_extra = [record for record in layers if record.extra is not None]
    found = Penalties.of([(record.extra, record.parameters) for record in with_extra if record.extra is not None])
    capture.suspect(
        record.model_layer
        for record, (penalty, _) in zip(with_extra, found.found, strict=True)
        if not penalty.exact and not isinstance(record.layer, Given)
    )
    return found
