"""`python -m exercises.builder`."""

import sys

from exercises.builder.build import main

sys.exit(main())
