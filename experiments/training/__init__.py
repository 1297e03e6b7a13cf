"""What training the bundled model needs besides its loop."""
