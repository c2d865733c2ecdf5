"""The front page, a live demonstration: points stream into four models, pixels into a picture.

pages/         what the browser gets
session.py     one WebSocket: messages in, answers out
tabs.py        what the messages do: points and the mixtures that models predict, pixels and images
"""
