"""python -m experiments.report: experiments/model_report.py says what it does."""

import sys

from experiments.model_report import main

sys.exit(main())
