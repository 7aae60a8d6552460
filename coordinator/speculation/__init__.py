"""What a sequence may say next, guessed from its own tokens, and how many guesses a step is worth."""
