"""Grammars that constrain answers: the vocabulary that they are matched against, and the state of one answer."""
