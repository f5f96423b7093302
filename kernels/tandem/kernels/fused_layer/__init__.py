"""A dense decoder's work on few rows: a layer in two calls, around its attention, or all layers in one."""

from __future__ import annotations

from tandem.kernels.fused_layer.layers import DenseLayers, PagedRows, join
from tandem.kernels.fused_layer.row import LIBRARY, DenseRow, LayerParts, fuse

__all__ = ["LIBRARY", "DenseLayers", "DenseRow", "LayerParts", "PagedRows", "fuse", "join"]
