"""`python -m verifier_service`: one verifier pod, configured by flags and GRAFTREE_* variables."""

from graftree.config import VerifierConfig
from graftree.process import main
from verifier_service.pod import VerifierPod

if __name__ == "__main__":
    main(VerifierPod, VerifierConfig)
