//! Conversations in the shape of OpenAI's chat API.

use serde_json::{Map, Value};

use super::{Result, TextError};

/// Messages and tools, as [`super::Chat`] takes them.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Messages {
    /// One object each, with `role`, `content` and what else the template reads.
    pub messages: Vec<Value>,
    /// Declarations of tools, empty for none.
    pub tools: Vec<Value>,
}

impl Messages {
    /// Reads a list of messages, or an object with `messages` and perhaps `tools`.
    ///
    /// # Errors
    /// [`TextError::Messages`] with the number of the message that is wrong.
    pub fn from_json(text: &str) -> Result<Self> {
        let value = serde_json::from_str(text).map_err(|error| wrong(error.to_string()))?;
        Self::from_value(value)
    }

    /// As [`Messages::from_json`], from a value that was read.
    pub fn from_value(value: Value) -> Result<Self> {
        let (messages, tools) = match value {
            Value::Array(messages) => (Value::Array(messages), Value::Null),
            Value::Object(mut object) => {
                let mut take = |key| object.remove(key).unwrap_or(Value::Null);
                (take("messages"), take("tools"))
            }
            _ => (Value::Null, Value::Null),
        };
        let Value::Array(messages) = messages else {
            return Err(wrong("neither a list of messages nor an object with `messages`".into()));
        };
        let tools = match tools {
            Value::Null => Vec::new(),
            Value::Array(tools) => tools,
            _ => return Err(wrong("`tools` is not a list".into())),
        };
        if messages.is_empty() {
            return Err(wrong("no message".into()));
        }
        for (at, message) in messages.iter().enumerate() {
            check_message(message).map_err(|why| wrong(format!("message {}: {why}", at + 1)))?;
        }
        for (at, tool) in tools.iter().enumerate() {
            let name = tool.pointer("/function/name").and_then(Value::as_str);
            name.ok_or_else(|| wrong(format!("tool {}: no `function.name`", at + 1)))?;
        }
        Ok(Self { messages, tools })
    }
}

fn wrong(reason: String) -> TextError {
    TextError::Messages { reason }
}

fn check_message(message: &Value) -> Result<(), String> {
    let message = message.as_object().ok_or("not an object")?;
    let role = message.get("role").and_then(Value::as_str).ok_or("no `role`")?;
    if !matches!(role, "system" | "developer" | "user" | "assistant" | "tool") {
        return Err(format!("the role `{role}` is not system, developer, user, assistant or tool"));
    }
    match message.get("content") {
        Some(Value::String(_)) => Ok(()),
        Some(Value::Array(parts)) => parts.iter().try_for_each(check_part),
        None | Some(Value::Null) if has_calls(message) => Ok(()),
        None | Some(Value::Null) => Err("no `content`".to_owned()),
        Some(_) => Err("`content` is neither text nor a list of parts".to_owned()),
    }
}

fn has_calls(message: &Map<String, Value>) -> bool {
    message.get("tool_calls").and_then(Value::as_array).is_some_and(|calls| !calls.is_empty())
}

fn check_part(part: &Value) -> Result<(), String> {
    match part.get("type").and_then(Value::as_str) {
        Some("text") if part.get("text").is_some_and(Value::is_string) => Ok(()),
        Some("text") => Err("a part of type `text` has no `text`".to_owned()),
        Some(other) => Err(format!("a part of type `{other}`, and the program takes text alone")),
        None => Err("a part has no `type`".to_owned()),
    }
}

#[cfg(test)]
mod tests {
    use super::Messages;

    #[test]
    fn both_shapes_are_read() {
        let list = r#"[{"role": "user", "content": [{"type": "text", "text": "Hi"}]}]"#;
        let object =
            format!(r#"{{"messages": {list}, "tools": [{{"function": {{"name": "f"}}}}]}}"#);
        let (list, object) = (Messages::from_json(list), Messages::from_json(&object));
        let (list, object) = (list.expect("a list"), object.expect("an object"));
        assert_eq!((list.messages, list.tools.len()), (object.messages, 0));
        assert_eq!(object.tools.len(), 1);
    }

    #[test]
    fn what_is_wrong_is_said() {
        for (text, word) in [
            ("", "EOF"),
            ("3", "neither a list"),
            ("[]", "no message"),
            ("{}", "neither a list"),
            (r#"[{"role": "user", "content": "a"}, 1]"#, "message 2: not an object"),
            (r#"[{"content": "a"}]"#, "message 1: no `role`"),
            (r#"[{"role": "robot", "content": "a"}]"#, "`robot`"),
            (r#"[{"role": "user"}]"#, "no `content`"),
            (r#"[{"role": "assistant", "tool_calls": []}]"#, "no `content`"),
            (r#"[{"role": "user", "content": 1}]"#, "neither text nor"),
            (r#"[{"role": "user", "content": [{"type": "image"}]}]"#, "`image`"),
            (r#"[{"role": "user", "content": [{"type": "text"}]}]"#, "no `text`"),
            (r#"{"messages": [{"role": "user", "content": ""}], "tools": 1}"#, "`tools`"),
            (r#"{"messages": [{"role": "user", "content": ""}], "tools": [{}]}"#, "tool 1"),
        ] {
            let message = Messages::from_json(text).expect_err(text).to_string();
            assert!(message.contains(word), "{text}: {message}");
        }
    }
}
