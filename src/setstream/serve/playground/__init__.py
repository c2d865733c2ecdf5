"""The front page, a live demonstration: points stream into four models, pixels into a picture.

pages/         what the browser gets
session.py     one WebSocket: messages in, answers out
clusters.py    the first tab: points, and the mixtures that models predict
pictures.py    the second: pixels, and the images that models predict
"""
