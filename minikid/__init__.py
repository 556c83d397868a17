"""minikid: the minimal pure-PyTorch reference implementation of knowledge-infused decoding."""
