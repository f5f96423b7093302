"""`python -m tandem.router --config FILE`."""

import sys

from tandem.router.server.main import main

if __name__ == "__main__":
    sys.exit(main())
