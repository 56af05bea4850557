"""The model families that come with loadkit. Importing this package does not import torch."""
