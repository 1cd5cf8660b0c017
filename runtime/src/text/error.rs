use std::io;

use thiserror::Error;

/// Result of this module.
pub type Result<T, E = TextError> = std::result::Result<T, E>;

/// Why text could not be read, rendered or encoded.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum TextError {
    /// The tokenizer's bytes are damaged, contradict themselves or describe something else.
    #[error("tokenizer.json can't be loaded: {reason}")]
    BadTokenizer {
        /// What is wrong, with line and column where the JSON is.
        reason: String,
    },
    /// The tokenizer is valid, but of a kind for which ids or streamed text could be wrong.
    #[error("tokenizer.json uses {feature}, which this runtime does not support")]
    UnsupportedTokenizer {
        /// The setting, as the file spells it.
        feature: String,
    },
    /// The tokenizer has no id for some of the text.
    #[error("the text can't be encoded with tokenizer.json: {reason}")]
    Encode {
        /// What the tokenizer says.
        reason: String,
    },
    /// The template's source is wrong, or fails on this conversation.
    #[error("chat template{}: {reason}", at(*.line))]
    Template {
        /// Line in the template's source, from 1, if one is at fault.
        line: Option<usize>,
        /// What went wrong there.
        reason: String,
    },
    /// The template called `raise_exception`: it does not accept such a conversation.
    #[error("the chat template refuses this conversation: {message}")]
    Refused {
        /// The template's own words.
        message: String,
    },
    /// Rendering took more steps or gave more text than any conversation needs.
    #[error("chat template{}: stopped after {limit}; it does not seem to end", at(*.line))]
    Runaway {
        /// Line in the template's source, from 1, if it is known.
        line: Option<usize>,
        /// The limit that was reached, with its unit.
        limit: String,
    },
    /// A conversation is not in the shape of OpenAI's chat API.
    #[error("the messages can't be read: {reason}")]
    Messages {
        /// Which message, and what is wrong with it.
        reason: String,
    },
    /// The system refused a thread, whose stack is most of what it needs.
    #[error("there is not enough memory for a thread with {stack} bytes of stack: {source}")]
    NoThread {
        /// Bytes of address space.
        stack: usize,
        /// The answer of the operating system.
        source: io::Error,
    },
    /// Every private-use character occurs in the conversation, so none is left to mark text with.
    #[error("the conversation uses all of Unicode's private-use characters; remove some")]
    NoMarkLeft,
}

fn at(line: Option<usize>) -> String {
    line.map_or(String::new(), |line| format!(", line {line}"))
}
