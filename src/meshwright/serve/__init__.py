"""Serving: requests to tokens (engine), tokens to text, text over HTTP.

    http/        the OpenAI API on a port: server, app, protocol, asking, forms, stream, limits, errors
    generation   the text of the answers to one HTTP request
    text         tokens to text a token at a time, stop strings; tokenizer, chat: text to tokens
    engine       the thread that owns the device; the Runner it drives
    scheduler    which request runs in which slot
    sampling     logits to tokens

The engine and what lies below it know tokens, never text.
"""
