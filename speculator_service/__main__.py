"""`python -m speculator_service`: one speculator pod, configured by flags and GRAFTREE_* variables."""

from graftree.config import SpeculatorConfig
from graftree.process import main
from speculator_service.pod import SpeculatorPod

if __name__ == "__main__":
    main(SpeculatorPod, SpeculatorConfig)
