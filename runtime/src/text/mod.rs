//! Text in and out of a program: tokenizer, chat template and streamed output.
//!
//! Everything here is read from bytes that the program file carries (`tokenizer.json`, the chat
//! template's source, ids); no model family is named. A conversation becomes ids in two steps:
//! [`ChatTemplate::render`] keeps apart what the template wrote and what people wrote, and
//! [`Tokenizer::encode_rendered`] makes control ids of the former only. Generated ids become
//! text through a [`TextStream`], and [`StopIds`] says where an answer ends.

mod added;
mod clock;
mod engine;
mod error;
mod guard;
mod python;
mod schema;
mod stack;
mod stop;
mod stream;
mod template;
mod tokenizer;

pub use error::{Result, TextError};
pub use guard::Rendered;
pub use stop::StopIds;
pub use stream::{ControlText, TextStream};
pub use template::{Chat, ChatTemplate};
pub use tokenizer::Tokenizer;
