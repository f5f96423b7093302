#!/usr/bin/env bash
# Put promtool, which the tests of alert rules run, into .venv/bin: the program alone, out of Debian's package of
# Prometheus. Does nothing where there is one.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
command -v promtool >/dev/null && exit 0
[ -x .venv/bin/promtool ] && exit 0
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
apt-get download -qq prometheus 2>/dev/null || { apt-get update -qq && apt-get download -qq prometheus; }
dpkg -x prometheus_*.deb .
install -m 755 usr/bin/promtool "$OLDPWD/.venv/bin/promtool"
