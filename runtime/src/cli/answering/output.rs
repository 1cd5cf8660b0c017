//! Answers as JSON, as `runtime/OUTPUT.md` describes it.

use serde_json::{Map, Value, json};

use super::answer::Answer;
use super::stats::{Place, Stats};
use crate::Logprobs;
use crate::text::{ControlText, Tokenizer};

/// One answered prompt.
pub(super) fn answered(
    id: Option<Value>,
    answer: &Answer,
    stats: &Stats,
    place: &Place,
    tokenizer: &Tokenizer,
) -> Value {
    let mut object = named(id);
    object.insert("text".to_owned(), answer.text.clone().into());
    let thought = Some(answer.thought.trim()).filter(|thought| !thought.is_empty());
    object.insert("thought".to_owned(), thought.into());
    object.insert("ids".to_owned(), answer.ids.clone().into());
    if !answer.logprobs.is_empty() {
        let drawn = answer.ids.iter().zip(&answer.logprobs);
        let list = drawn.map(|(id, logprobs)| logprobs_of(*id, logprobs, tokenizer)).collect();
        object.insert("logprobs".to_owned(), Value::Array(list));
    }
    object.insert("finish_reason".to_owned(), answer.end.name().into());
    object.insert("stats".to_owned(), stats.json(place, answer));
    Value::Object(object)
}

/// One prompt that could not be answered.
pub(super) fn failed(id: Option<Value>, error: &str) -> Value {
    let mut object = named(id);
    object.insert("error".to_owned(), error.into());
    Value::Object(object)
}

fn named(id: Option<Value>) -> Map<String, Value> {
    id.map(|id| ("id".to_owned(), id)).into_iter().collect()
}

fn logprobs_of(id: u32, logprobs: &Logprobs, tokenizer: &Tokenizer) -> Value {
    // JSON has no −∞.
    let number = |logprob: f32| Some(logprob).filter(|logprob| logprob.is_finite());
    let token = |id: u32, logprob: f32| {
        let text = tokenizer.decode(&[id], ControlText::Show);
        json!({"id": id, "text": text, "logprob": number(logprob)})
    };
    let mut object = token(id, logprobs.drawn);
    let top: Vec<Value> = logprobs.top.iter().map(|(id, logprob)| token(*id, *logprob)).collect();
    if let Some(object) = object.as_object_mut() {
        object.insert("top".to_owned(), top.into());
    }
    object
}
