"""The sources ``http(s)://``, ``s3://``, ``gs://`` and ``az://``."""
