"""A driver without a Ray: `foreign_driver.py FOUND HEARD` finds the workers in one file and writes orders to
another."""

import json
import sys
from pathlib import Path

if __name__ == "__main__":
    print('{"attached": "nowhere"}', flush=True)
    for line in sys.stdin:
        with Path(sys.argv[2]).open("a") as heard:
            heard.write(line)
        if '"find"' in line:
            print(Path(sys.argv[1]).read_text(), flush=True)
        elif '"stop"' in line:
            print(json.dumps({"worker": json.loads(line)["stop"], "exited": "as it was told"}), flush=True)
