//! Text in and out of a program: tokenizer, chat template and streamed output.
//!
//! Everything here is read from bytes that the program file carries (`tokenizer.json`, the chat
//! template's source, ids); no model family is named. A conversation becomes ids in two steps:
//! [`ChatTemplate::render`] keeps apart what the template wrote and what people wrote, and
//! [`Tokenizer::encode_rendered`] makes control ids of the former only. Generated ids become
//! text through a [`TextStream`], or a [`ThoughtStream`] where thoughts are told apart; [`StopIds`]
//! and [`StopStrings`] say where an answer ends.

mod added;
mod clock;
mod confined;
mod engine;
mod error;
mod guard;
mod messages;
mod modality;
mod python;
mod schema;
mod stop;
mod stop_strings;
mod stream;
mod template;
mod thought;
mod tokenizer;

pub use error::{Result, TextError};
pub use guard::Rendered;
pub use messages::Messages;
pub use modality::modality_ids;
pub use stop::StopIds;
pub use stop_strings::StopStrings;
pub use stream::{ControlText, TextStream};
pub use template::{Chat, ChatTemplate};
pub use thought::{Part, ThoughtStream};
pub use tokenizer::Tokenizer;
