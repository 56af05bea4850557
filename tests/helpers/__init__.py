"""Things several rooms' tests share. Nothing here is a test."""
