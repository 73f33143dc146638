"""`python -m graftree.cli`: the command where no script is on the path."""

from __future__ import annotations

import sys

from graftree.cli import main

sys.exit(main())
