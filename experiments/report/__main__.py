"""Runs python -m experiments.report. experiments/model_report.py describes it."""

import sys

from experiments.model_report import main

sys.exit(main())
