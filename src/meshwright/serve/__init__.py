"""Serving: requests to tokens (engine), tokens to text, text over HTTP.

    http/        the OpenAI API on a port: server, app, protocol, asking, forms, stream, limits, errors
    generation   the text of the answers to one HTTP request
    text         tokens to text a token at a time, stop strings; tokenizer, chat: text to tokens
    engine       the thread that owns the device: schedules, runs, hands out tokens
    scheduler    the work of the next step, as a Batch of batch.py; pages, prefix: owners of cache pages
    runner       a Batch as arrays, and the compiled programs of programs.py
    sampling     logits to tokens; speculate: guesses of the next ones

The engine and the layers below it know tokens, never text.
"""
