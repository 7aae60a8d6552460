"""Accuracy of the reported sources of answers, and the cost of reporting them."""
