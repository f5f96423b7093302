"""`python -m tandem.clusterctl`."""

from tandem.clusterctl.main import main

main()
