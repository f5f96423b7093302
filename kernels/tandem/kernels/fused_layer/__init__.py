"""A dense decoder's work: a layer in two calls, around its attention, or all layers in one."""

from __future__ import annotations

from tandem.kernels.fused_layer.layers import DenseLayers, PagedChunks, PagedRows, join
from tandem.kernels.fused_layer.row import LIBRARY, DenseRow, LayerParts, fuse

__all__ = ["LIBRARY", "DenseLayers", "DenseRow", "LayerParts", "PagedChunks", "PagedRows", "fuse", "join"]
