"""Kernels and a whole model on a GPU: checked against their references first, then measured against its limits."""

from bench.gpu.run import main

raise SystemExit(main())
