"""`python -m bench.gpu`."""

from bench.gpu.run import main

raise SystemExit(main())
