"""`python -m router`: one router pod, configured by flags and GRAFTREE_* variables."""

from graftree.config import RouterConfig
from graftree.process import main
from router.pod import RouterPod

if __name__ == "__main__":
    main(RouterPod, RouterConfig)
