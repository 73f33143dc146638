"""All tests; tiny random models unless marked `real_model`."""
