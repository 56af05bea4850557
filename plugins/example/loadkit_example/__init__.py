"""The load format ``raw_folder``: an example of what anybody can publish."""
